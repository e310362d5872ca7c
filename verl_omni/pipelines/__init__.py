"""Model adapters, one package an architecture, and the sampling loop that they share."""
