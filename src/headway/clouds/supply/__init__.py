"""What a release is made of: images and their layers, pins of what they are built from, bills of materials."""
