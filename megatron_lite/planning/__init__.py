"""The run before it runs: the same code under fake groups, on tensors without memory."""
