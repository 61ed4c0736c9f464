"""P4 (initialisation and network effects): its figures, and one study of our own beside them."""
