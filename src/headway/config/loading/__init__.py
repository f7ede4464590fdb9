"""From YAML files and overrides to a config: places, error messages, presets, and the generated reference."""
