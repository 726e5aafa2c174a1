"""What each symptom looks for in the evidence: a function each, by how runs fail."""
