"""What is checked before any worker starts. The checks know every room below, so they live here and not in config/."""
