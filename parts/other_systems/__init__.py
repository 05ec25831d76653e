"""What flags of other systems are called here."""
