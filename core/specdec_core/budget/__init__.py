"""One budget for a step: which requests draft, how deep, and which draft tokens are verified, by the expected time per
output token."""
