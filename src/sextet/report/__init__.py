"""What people look at: tables and figures of a run as one HTML file, and comparisons of runs."""
