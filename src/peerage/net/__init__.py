"""The network engine: one real process per node, which trusts nobody's messages."""
