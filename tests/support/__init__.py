"""What several tests share: launching, waiting, looking for left-over processes."""
