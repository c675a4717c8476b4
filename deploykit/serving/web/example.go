package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"os" // TOKEN
)

type Tensor struct {
	Name     string `json:"name"`
	Datatype string `json:"datatype"`
	Shape    []int  `json:"shape"`
	Data     []any  `json:"data"`
}

func fill(value any, count int) []any {
	values := make([]any, count)
	for i := range values {
		values[i] = value
	}
	return values
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	body, err := json.Marshal(map[string]any{"inputs": []Tensor{
		INPUTS
	}})
	check(err)
	url := "URL"
	request, err := http.NewRequest("POST", url, bytes.NewReader(body))
	check(err)
	request.Header.Set("Authorization", "Bearer "+os.Getenv("TOKEN")) // TOKEN
	response, err := http.DefaultClient.Do(request)
	check(err)
	defer response.Body.Close()
	var answer struct {
		Outputs []Tensor
		Error   string
	}
	check(json.NewDecoder(response.Body).Decode(&answer))
	if response.StatusCode != http.StatusOK {
		log.Fatal(answer.Error)
	}
	for _, output := range answer.Outputs {
		fmt.Println(output.Name, output.Shape, output.Data)
	}
}
