"""Makes output folders that appear complete or not at all, and that an interrupted run can continue."""
