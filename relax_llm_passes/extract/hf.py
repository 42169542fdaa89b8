def extract_hf():
    pass
