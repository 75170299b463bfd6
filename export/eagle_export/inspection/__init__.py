"""What `eagle-export inspect` says of a target and a head before anything is downloaded, read or computed."""
