"""Finished datasets: merged, cut, verified and compared, in a memory that does not grow with them."""
