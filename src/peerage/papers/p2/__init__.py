"""P2 (HWA, the ancestor of DecHW with a server): every table and figure."""
