"""P4 (initialisation and network effects): its figures, and one additional study."""
