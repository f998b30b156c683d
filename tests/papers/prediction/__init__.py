"""What is predicted of measured runs, and how often intervals hold."""
