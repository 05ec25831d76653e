"""Tasks to learn, and the small model that is made for them."""
