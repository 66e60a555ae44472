"""Token data of other libraries: read into datasets, and written from them."""
