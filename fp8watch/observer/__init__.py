"""What one attach observes at run time: which rows, in which pass, by which checks."""
