"""Work in parts, over processes, Ray, Dask or any `concurrent.futures.Executor`."""
