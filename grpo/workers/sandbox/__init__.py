"""Programs that no person has read, run where they can do no harm."""
