"""For plugin authors: try a proposer on token lists, and check that it keeps the contract."""

from specdec_core.testing.drive import SimpleRequest, propose

__all__ = ["SimpleRequest", "propose"]
