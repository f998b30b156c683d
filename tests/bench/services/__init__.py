"""What single services cost, at work, at rest and when they start again."""
