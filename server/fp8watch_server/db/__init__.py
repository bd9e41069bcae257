"""Database layer: tables, dialects, migrations, leader election."""
