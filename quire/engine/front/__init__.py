"""The front: from what users hand in to validated requests, and from the tokens of the core to what they see."""
