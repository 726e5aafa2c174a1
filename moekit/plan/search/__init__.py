"""`moekit plan --search`: the legal layouts of a recipe's model, the fast ones of them, and the way there."""
