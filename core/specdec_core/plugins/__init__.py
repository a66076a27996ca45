"""Finds plugins, loads them and provides what they offer.

A plugin is an entry point of group `specdec`, named like the proposer, verifier or KV manager that it offers; one that
offers none of these (only `specdec_ops`, `specdec_commands` or `specdec_step_finished`) may have any name. A
distribution with several proposers, say, declares one entry point for each; these may share a module, which is then
imported once. So all names are known without importing anything, and a plugin that is disabled, broken or installed
twice is reported under the name that the user typed.
"""

from specdec_core.plugins.listing import PluginInfo
from specdec_core.plugins.manager import Plugins, PluginWarning

__all__ = ["PluginInfo", "PluginWarning", "Plugins"]
