"""Lineage of new datasets: written with them, or carried along from others."""
