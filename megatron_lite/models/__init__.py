"""Model families, and what they share."""
