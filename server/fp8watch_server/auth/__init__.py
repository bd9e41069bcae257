"""Who may do what: bearer tokens, and the command that makes them."""
