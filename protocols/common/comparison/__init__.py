"""What a server compares clients by: updates, signatures of gradients, or eigenvectors."""
