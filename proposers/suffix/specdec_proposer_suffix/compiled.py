"""numba decorators for this plugin's inner loops."""

from specdec_core import compiled

jit = compiled(nogil=True)
jit_inline = compiled(nogil=True, forceinline=True)
"""Like `jit`, but numba also inlines the function into its callers. Otherwise each call with a `Store` as an argument
would copy the descriptors of its arrays, dozens of machine words."""
