"""P0 (DecHW): every table and figure, and two additional studies."""
