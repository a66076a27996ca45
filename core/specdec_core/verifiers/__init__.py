"""The acceptance rules of core: which draft tokens are kept, and the recovered or bonus token after them."""
