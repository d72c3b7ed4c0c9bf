"""Other projects' files of devices and networks, read into profiles and written from them.

    formats        the formats by name, and which of them are written as well as read
    asked, made    what an importer is told beside its file; what it gives back, checked
    files          reading a file of a limited size; names that are profile names
    fedscale, mahimahi, webpagetest, devtools, power_profile, bouquetfl
                   one format each

A file is data from a stranger: nothing in it is run, followed or trusted to be short. What is wrong with one
is a `ProfileError` of one line.
"""
