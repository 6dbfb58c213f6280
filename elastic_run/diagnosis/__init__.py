"""Finds the causes of broken jobs: before a job starts, while it runs, and after it has failed."""
