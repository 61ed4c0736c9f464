"""P0 (DecHW): every table and figure, and two of our own beside them."""
