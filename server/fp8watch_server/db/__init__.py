"""Tables, dialects and migrations: what the rooms above store their data in."""
