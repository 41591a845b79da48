"""Person re-identification: MGN and RMGL beside their baselines, from images to a searchable gallery."""
