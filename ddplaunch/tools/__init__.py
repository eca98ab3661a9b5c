"""What people do besides running a job. Each tool stands alone and reads what runs leave, or asks them."""
