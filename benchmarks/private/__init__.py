"""What does ε buy? Clusters and accuracy over noise, beside the field and its own plans."""
