"""Authentication and authorisation: bearer tokens, and the command that manages them."""
