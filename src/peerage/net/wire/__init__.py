"""Messages as bytes, and the connections that carry them."""
