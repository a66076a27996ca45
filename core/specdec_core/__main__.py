"""`python -m specdec_core` is the command `spec-decode`."""

from specdec_core.cli import main

main(prog_name="spec-decode")
