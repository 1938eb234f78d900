"""What dit_graph must do on every device."""
