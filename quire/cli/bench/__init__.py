"""What `quire bench` measures beside offline generation: servers under load, and start-up."""
