"""Documents and lines in another order, in two sequential passes and a bounded memory."""
