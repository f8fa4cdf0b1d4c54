"""What runs on the controller: renders bundles, reads the inventory, speaks SSH, prints tables."""
