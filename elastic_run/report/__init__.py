"""Texts for the user: lines while the job runs, a report when it ends, failure.json, the event log and its page."""
