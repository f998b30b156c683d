"""What an iteration spends its time on. Source: Muri §5."""
