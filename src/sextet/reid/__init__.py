"""Person re-identification: networks, data, evaluation and a searchable gallery."""
