"""What joint training is worth: objectives and refresh modes compared on the factbook data."""
