"""Megatron's constructors, names and subclass hooks, over an order, stored tokens and an assemble function."""
